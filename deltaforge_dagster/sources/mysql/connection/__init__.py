"""The MySQL server: logins, errors, identity, and what it says about its binary log."""
