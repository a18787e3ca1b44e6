//! `resourcesPolicy`: resources of a sidecar, computed from those of the Pod's containers.
//!
//! [`aggregate`] adds up the containers, or takes their maximum; [`expression`] evaluates what the user wrote with the
//! result. [`quantity`] is the arithmetic below both.

pub mod aggregate;
pub mod expression;
mod lexer;
pub mod quantity;

pub use aggregate::{resources, target_regex};
pub use expression::{ExpressionError, evaluate, validate};
pub use quantity::Quantity;

/// A resource that expressions exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// CPU, in cores.
    Cpu,
    /// Memory, in bytes.
    Memory,
}

impl Resource {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Memory];

    /// Its name in lists of resources, which is also that of the variable in expressions.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

#[cfg(test)]
mod tests;
