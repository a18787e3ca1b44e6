//! The development commands of kruise-rs.

pub mod bench;
pub mod codegen;
pub mod demo;
pub mod image;
pub mod reproduce;
pub mod test;
