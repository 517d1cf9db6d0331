"""The `magnetar` command's sub-commands for the broker and its operators."""
