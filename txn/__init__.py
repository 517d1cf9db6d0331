"""Transactions: headers, claims, acknowledgement records, and what readers may see of them."""
