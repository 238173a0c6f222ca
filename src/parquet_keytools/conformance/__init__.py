"""Is a file really protected, and does it follow the specification? Rule by rule."""
