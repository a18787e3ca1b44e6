//! `resourcesPolicy`: resources of a sidecar, computed from those of the Pod's containers.
//!
//! [`aggregate`] adds up the containers, or takes their maximum; [`expression`] evaluates what the user wrote with the
//! result. [`quantity`] is the arithmetic below both.

pub mod aggregate;
pub mod expression;
mod lexer;
pub mod quantity;

pub use aggregate::{resources, target_regex};
pub use expression::{ExpressionError, Resource, evaluate, validate};
pub use quantity::Quantity;

#[cfg(test)]
mod tests;
