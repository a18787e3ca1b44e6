//! The commands people type while working on kruise-rs, and the test bed that its tests run on.

pub mod bench;
pub mod cluster;
pub mod codegen;
pub mod demo;
pub mod image;
pub mod peer;
pub mod port;
pub mod test;

mod parts;
mod process;
mod sandbox;
pub mod wait;
