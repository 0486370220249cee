"""ZeRO: flat parameters, their sharding, gradient reduction and unsharding."""
