"""The engines and the three stage workers with their gRPC services."""
