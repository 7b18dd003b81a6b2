"""Pure functions from measurements to configurations, with numpy and PuLP but without torch."""
