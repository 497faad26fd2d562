"""Command-line programs of the project: set-up, data, models, drivers, visualisation."""
