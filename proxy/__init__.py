"""The only way to the engines: sessions, token-in token-out, preemption, and the record of every token."""
