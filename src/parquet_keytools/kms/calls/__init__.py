"""A call across a network: its deadline and attempts, and the rate, breaker and threads that calls share."""
