"""Who a device is, who belongs to a swarm, and how a new device comes in."""
