"""The `magnetar` command's sub-commands for users of topics."""
