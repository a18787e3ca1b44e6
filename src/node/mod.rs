//! The daemon: one folder per duty, each with its own front door.

pub mod control;
pub mod live;
