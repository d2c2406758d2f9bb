"""The filters, which compute one step for all keys at once, and their shared parts."""
