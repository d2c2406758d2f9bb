"""How a model is doing: status, advice, alarms, pages of its health and of comparisons; and its maintenance."""
