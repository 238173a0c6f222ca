"""What every part of the package runs on: what makes forks safe, and how the package shows itself to people."""
