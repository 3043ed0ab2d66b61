"""Puts the parts together: broker, engine, supervisor, demos, commands. Only it imports all the others."""
