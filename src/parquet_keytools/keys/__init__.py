"""Key material: who wraps what."""
