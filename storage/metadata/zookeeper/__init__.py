"""The metadata store on Apache ZooKeeper."""
