//! The variables and operations of a policy, in the order in which it evaluates them.

use std::collections::BTreeSet;

use super::sets::Peers;

/// What a policy computes and writes.
#[derive(Debug, Default)]
pub(super) struct Program {
    /// Name and expression; each may use those before it.
    pub(super) variables: Vec<(String, String)>,
    /// Expressions of lists of JSON patch operations.
    pub(super) operations: Vec<String>,
    /// Other sets for which there is a variable.
    peers: BTreeSet<usize>,
    /// Expressions with names of containers whose environment there is a variable for.
    sources: Vec<String>,
}

impl Program {
    /// Adds a variable; returns the expression that refers to it.
    pub(super) fn variable(&mut self, name: impl Into<String>, expression: impl Into<String>) -> String {
        let name = name.into();
        let reference = format!("variables.{name}");
        self.variables.push((name, expression.into()));
        reference
    }

    pub(super) fn operation(&mut self, operations: impl Into<String>) {
        self.operations.push(operations.into());
    }

    /// The environment of the container of this name, an expression.
    pub(super) fn env_of(&mut self, source: String) -> String {
        let known = self.sources.iter().position(|one| *one == source);
        let at = known.unwrap_or(self.sources.len());
        let name = format!("env{at}");
        if known.is_some() {
            return format!("variables.{name}");
        }
        let env = format!("variables.env.filter(e, e.container == {source})");
        self.sources.push(source);
        self.variable(name, env)
    }

    /// Whether another set applies to the Pod.
    pub(super) fn peer(&mut self, at: usize, peers: &Peers<'_>) -> String {
        let name = format!("peer{at}");
        if self.peers.insert(at) {
            return self.variable(name, peers.active(at));
        }
        format!("variables.{name}")
    }
}

/// An operation that adds a value; both are expressions.
pub(super) fn add(path: &str, value: &str) -> String {
    format!("JSONPatch{{op: 'add', path: {path}, value: {value}}}")
}
