"""Links between nodes over gRPC with mutual TLS. Read `transport` first."""
