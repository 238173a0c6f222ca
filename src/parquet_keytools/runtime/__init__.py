"""What every part of the package runs on: audit log, telemetry, and what makes forks safe."""
