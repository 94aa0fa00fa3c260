"""Configurations: a ConfigDict per experiment."""
