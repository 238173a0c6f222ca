"""Key material, and how data keys are wrapped and unwrapped."""
