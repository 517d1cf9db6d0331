"""Authentication and authorisation: the role of a peer, and what that role may do."""
