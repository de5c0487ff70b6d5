//! The real filesystem.
