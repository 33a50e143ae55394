"""The console: a static page that shows the fleet at work and lets its reader try it."""
