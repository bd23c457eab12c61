"""The replication stream: `replication` receives it; its slot, publication and heartbeats."""
