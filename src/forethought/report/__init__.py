"""Statistics, pictures and pages from run directories, beside published curves. No torch here."""
