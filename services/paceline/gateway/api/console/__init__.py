"""The console: a page that shows the fleet at work and lets its reader try it, and the live figures behind it."""
