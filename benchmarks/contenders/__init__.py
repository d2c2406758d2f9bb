"""Who is measured: ours, Spark's limit, state by the key, other libraries; and that all give the same estimates."""
