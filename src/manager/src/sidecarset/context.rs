//! What all reconciles share, what is kept of a set between them, and the context of one.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::injections::Injections;
use super::observe::Index;
use crate::Context;
use crate::status_pacer::StatusPacer;
use kruise_api::sidecarset::SidecarSet;
use kruise_workload::in_place::Pod;

/// What all reconciles share.
pub struct ControllerState {
    pub manager: Context,
    /// Namespace of the revisions.
    pub namespace: String,
    pub index: Mutex<Index>,
    pub states: Mutex<HashMap<String, Arc<tokio::sync::Mutex<SetState>>>>,
    /// How new Pods are injected.
    pub injections: Injections,
}

/// What is kept of a set between reconciles.
#[derive(Default)]
pub struct SetState {
    pub uid: String,
    pub status_pacer: StatusPacer,
    /// Earliest time of the next reconcile.
    pub next_reconcile: Option<Instant>,
    /// Name collisions that the status does not count yet.
    pub collisions: Option<i32>,
    /// When the adoption of revisions that was refused is tried again.
    pub adoption_retry_at: Option<Instant>,
    /// The same for the deletion of old ones.
    pub deletion_retry_at: Option<Instant>,
    /// The revision of the last event about Pods that cannot be updated in place.
    pub not_upgradable: String,
    /// Pods of the last event about Pods without the containers.
    pub not_injected: usize,
    /// Pods, by UID, whose update the API server did not accept: the set's generation, and until when they are left alone.
    /// They stay here until their update succeeds.
    pub refused: HashMap<String, (i64, Instant)>,
}

impl SetState {
    /// Whether to publish that this many Pods cannot be updated to the revision in place: once. A reconcile that switches
    /// containers off counts none.
    pub fn take_not_upgradable(&mut self, revision: &str, pods: usize) -> bool {
        let is_new = pods > 0 && self.not_upgradable != revision;
        if is_new {
            revision.clone_into(&mut self.not_upgradable);
        }
        is_new
    }

    /// The Pods, by UID, that are left alone now, and those that are tried again after all others. Otherwise a few Pods
    /// that are never updated would take the places of the others in turn, for ever.
    pub fn take_refused(
        &mut self,
        generation: i64,
        pods: &[&Pod],
        now: Instant,
    ) -> (BTreeSet<String>, BTreeSet<String>) {
        let existing: BTreeSet<&str> = match self.refused.is_empty() {
            true => BTreeSet::new(),
            false => pods.iter().map(|pod| pod.uid.as_str()).collect(),
        };
        self.refused
            .retain(|uid, (of, _)| *of == generation && existing.contains(uid.as_str()));
        let (left_alone, failed) = self
            .refused
            .iter()
            .partition::<Vec<_>, _>(|(_, (_, until))| now < *until);
        let uids =
            |pods: Vec<(&String, &(i64, Instant))>| pods.into_iter().map(|(uid, _)| uid.clone()).collect();
        (uids(left_alone), uids(failed))
    }

    /// When what the API server has refused is tried again, if that is after `now`.
    pub fn next_retry(&self, now: Instant) -> Option<Instant> {
        let pods = self.refused.values().map(|(_, until)| *until);
        let revisions = self.adoption_retry_at.into_iter().chain(self.deletion_retry_at);
        pods.chain(revisions).filter(|until| *until > now).min()
    }
}

/// One reconcile of a set.
pub struct SetContext<'a> {
    pub shared: &'a ControllerState,
    pub set: &'a SidecarSet,
    pub name: &'a str,
    pub uid: &'a str,
}

impl SetContext<'_> {
    /// Whether the set is still the one that is being reconciled.
    pub fn is_current(&self) -> bool {
        let set = self.shared.index().set(self.name);
        let reconciled = &self.set.metadata;
        set.is_some_and(|set| {
            let now = &set.metadata;
            now.generation == reconciled.generation && now.uid == reconciled.uid
        })
    }
}

impl ControllerState {
    pub fn new(manager: Context, namespace: &str) -> Self {
        Self {
            manager,
            namespace: namespace.to_owned(),
            index: Mutex::new(Index::new(namespace)),
            states: Mutex::default(),
            injections: Injections::default(),
        }
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn states(&self) -> MutexGuard<'_, HashMap<String, Arc<tokio::sync::Mutex<SetState>>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn pod_that_failed_is_remembered_until_it_is_updated() {
        let pod = |uid: &str| Pod::from_json(&serde_json::json!({ "metadata": { "name": uid, "uid": uid } }));
        let pods = ["a", "b"].map(pod);
        let pods: Vec<&Pod> = pods.iter().collect();
        let now = Instant::now();
        let soon = now + Duration::from_secs(10);
        let mut state = SetState {
            refused: [
                ("a", (2, soon)),
                ("b", (2, now)),
                ("gone", (2, soon)),
                ("old", (1, soon)),
            ]
            .map(|(uid, entry)| (uid.to_owned(), entry))
            .into(),
            ..SetState::default()
        };
        let set = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(state.take_refused(2, &pods, now), (set(&["a"]), set(&["b"])));
        assert_eq!(state.take_refused(2, &pods, soon), (set(&[]), set(&["a", "b"])));
        assert_eq!(state.refused.len(), 2, "Pods that are gone are forgotten");
        assert_eq!(
            state.take_refused(3, &pods, now),
            (set(&[]), set(&[])),
            "a new spec may be accepted"
        );
    }

    /// Nothing else may change in the set for days.
    #[test]
    fn set_is_reconciled_when_what_was_refused_is_tried_again() {
        let now = Instant::now();
        let after = |seconds| Some(now + Duration::from_secs(seconds));
        let mut state = SetState {
            adoption_retry_at: after(20),
            deletion_retry_at: after(10),
            ..SetState::default()
        };
        assert_eq!(state.next_retry(now), after(10));
        state.deletion_retry_at = Some(now);
        assert_eq!(state.next_retry(now), after(20));
        state
            .refused
            .insert("pod".to_owned(), (1, now + Duration::from_secs(5)));
        assert_eq!(state.next_retry(now), after(5));
    }

    #[test]
    fn pods_that_are_not_upgradable_are_published_once_per_revision() {
        let mut state = SetState::default();
        let published = [
            ("a", 0),
            ("a", 2),
            ("a", 0),
            ("a", 2),
            ("a", 1),
            ("b", 1),
            ("b", 1),
        ]
        .map(|(revision, pods)| state.take_not_upgradable(revision, pods));
        assert_eq!(published, [false, true, false, false, false, true, false]);
    }
}
