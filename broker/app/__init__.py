"""The process: a broker's parts made, handed to each other, started and stopped."""
