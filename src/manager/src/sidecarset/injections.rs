//! How each SidecarSet is injected: by its policy, or by the webhook.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kruise_api::validation::truncate;

/// Characters of an error in a condition.
const MAX_ERROR_CHARS: usize = 512;

/// How the new Pods of a set are injected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Injection {
    /// By its policy.
    Policy,
    /// By the webhook, for this reason.
    Webhook {
        /// For the condition.
        reason: &'static str,
        /// For the condition.
        message: String,
    },
}

impl Injection {
    pub fn webhook(reason: &'static str, why: &str) -> Self {
        let why = truncate(why, MAX_ERROR_CHARS);
        Self::Webhook {
            reason,
            message: format!("new Pods are injected by a webhook: {why}"),
        }
    }
}

/// What is known of how a set is injected.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KnownInjection {
    /// The set has not been compared with its policies since the start: what the status says is kept.
    #[default]
    NotYet,
    /// Nothing is injected, or the API server serves no policies.
    Nothing,
    /// It is injected so.
    Known(Injection),
}

/// How each set is injected.
#[derive(Debug, Default)]
pub struct Injections {
    /// By name.
    of: Mutex<HashMap<String, KnownInjection>>,
    /// The policies cannot be read, so that no set can have one.
    pub unreadable: AtomicBool,
    /// The API server serves no policies.
    pub unserved: AtomicBool,
}

impl Injections {
    pub fn get(&self, set: &str) -> KnownInjection {
        if self.unserved.load(Ordering::Relaxed) {
            return KnownInjection::Nothing;
        }
        if self.unreadable.load(Ordering::Relaxed) {
            let why = "the manager cannot list MutatingAdmissionPolicies and their bindings";
            return KnownInjection::Known(Injection::webhook("PoliciesUnreadable", why));
        }
        self.lock().get(set).cloned().unwrap_or_default()
    }

    /// Returns whether it changed.
    pub fn set(&self, set: &str, injection: KnownInjection) -> bool {
        let before = self.lock().insert(set.to_owned(), injection.clone());
        before != Some(injection)
    }

    pub fn remove(&self, set: &str) {
        self.lock().remove(set);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, KnownInjection>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
