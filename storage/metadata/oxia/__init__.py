"""The metadata store on Oxia."""
