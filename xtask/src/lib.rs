//! The commands people type while working on kruise-rs.
