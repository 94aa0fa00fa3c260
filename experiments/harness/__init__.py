"""What every experiment needs: flags, folders, training, timing, printing."""
