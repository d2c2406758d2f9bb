"""Learn parameters: maximum likelihood and EM, pooled, by group or per key."""
