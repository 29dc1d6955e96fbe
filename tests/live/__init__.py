"""Signs of life, who may write, and the plan of memory."""
