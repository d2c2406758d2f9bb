"""The contenders: ours, Spark's limit, state by the key, other libraries; and a check of equal estimates."""
