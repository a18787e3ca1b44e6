//! Keeps the Pods of CloneSets: how many there are, what they are made of, and how they are updated.

pub mod plan;
pub mod revision;
