//! Which set, in which revision, applies to a Pod.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::selector::is_empty;

use super::error::Unsupported;
use super::options::Options;
use super::selector::selects;
use crate::sidecarset::inject::candidates::Scope;
use crate::sidecarset::inject::revision::{Selected, find, percentage, restore};
use crate::sidecarset::overlap::are_disjoint;
use crate::sidecarset::set::SetView;
use kruise_api::cel::{LABELS, matches};

const REVISION: &str = "spec.injectionStrategy.revision";

/// A revision of a set, and the Pods that get it.
#[derive(Debug)]
pub(super) struct Variant<'a> {
    /// For the name of the policy.
    pub(super) suffix: &'static str,
    /// An expression; all Pods if there is none.
    pub(super) condition: Option<String>,
    pub(super) selected: Selected<'a>,
}

/// The revisions that Pods get.
pub(super) fn variants<'a>(
    set: &SetView<'a>,
    revisions: &'a [Arc<ControllerRevision>],
) -> Result<Vec<Variant<'a>>, Unsupported> {
    let all = |selected| {
        vec![Variant {
            suffix: "",
            condition: None,
            selected,
        }]
    };
    let Some(named) = set.spec.injected_revision() else {
        return Ok(all(set.into()));
    };
    let unsupported = |why| Unsupported::new(REVISION, format_args!("cannot be injected: {why}"));
    let Some(revision) = find(set, named, revisions).map_err(unsupported)? else {
        return Ok(all(set.into()));
    };
    let older = || restore(set, revision).map_err(unsupported);
    let [to_update, others] = [true, false].map(|to_update| percentage(named, set.spec, to_update));
    let update = set.spec.update_strategy.as_ref();
    let selector = update.and_then(|update| update.selector.as_ref());
    match (to_update, selector) {
        (1..100, _) => Err(Unsupported::new(
            REVISION,
            "is for a percentage of the Pods, and policies have no random numbers",
        )),
        (100.., _) => Ok(all(older()?)),
        (0, Some(selector)) if others > 0 => {
            let condition = matches(selector, LABELS);
            let older = Variant {
                suffix: ".older",
                condition: Some(format!("!{condition}")),
                selected: older()?,
            };
            let current = Variant {
                suffix: "",
                condition: Some(condition),
                selected: set.into(),
            };
            Ok(vec![current, older])
        }
        (0, _) => Ok(all(set.into())),
    }
}

/// The other sets that may inject the same Pods, in the order in which they do.
#[derive(Debug)]
pub(super) struct Peers<'a> {
    sets: Vec<Peer<'a>>,
    /// Number of those before this set.
    before: usize,
    name: &'a str,
    /// The set that this one replaces.
    base: Option<&'a str>,
    scope: Scope,
}

#[derive(Debug)]
struct Peer<'a> {
    name: &'a str,
    scope: Scope,
    base: Option<&'a str>,
    /// Whether it selects the Pod.
    selects: String,
    variants: Vec<Variant<'a>>,
}

impl<'a> Peers<'a> {
    pub(super) fn new(set: &SetView<'a>, options: &Options<'a>) -> Self {
        let others = options.sets.iter().filter(|other| other.name != set.name);
        // A policy need not change with sets that its Pods do not get.
        let others = others.filter(|other| !are_disjoint(set.spec, other.spec));
        let mut sets: Vec<Peer<'a>> = others
            .filter_map(|other| {
                let paused = other.spec.is_injection_paused();
                let selector = other.spec.selector.as_ref();
                let selector = selector.filter(|selector| !paused && !is_empty(selector))?;
                let current = || {
                    vec![Variant {
                        suffix: "",
                        condition: None,
                        selected: other.into(),
                    }]
                };
                Some(Peer {
                    name: other.name,
                    scope: Scope::of(other.spec),
                    base: other.canary_base(),
                    selects: selects(selector, other.spec.namespace_selector.as_ref()),
                    // Without a policy it comes by the webhook, later.
                    variants: variants(other, options.revisions).unwrap_or_else(|_| current()),
                })
            })
            .collect();
        sets.sort_by_key(|peer| (peer.scope, peer.name));
        let (name, scope) = (set.name, Scope::of(set.spec));
        let before = sets.partition_point(|peer| (peer.scope, peer.name) < (scope, name));
        Self {
            sets,
            before,
            name,
            base: set.canary_base(),
            scope,
        }
    }

    /// Whether no canary of this set selects the Pod; `None` if there is no canary.
    pub(super) fn not_replaced(&self) -> Option<String> {
        self.canaries(self.name).map(|canaries| format!("!{canaries}"))
    }

    /// Whether one of the canaries of a set selects the Pod.
    fn canaries(&self, base: &str) -> Option<String> {
        let canaries = self.sets.iter().filter(|peer| peer.base == Some(base));
        let canaries: Vec<&str> = canaries.map(|peer| peer.selects.as_str()).collect();
        (!canaries.is_empty()).then(|| format!("({})", canaries.join(" || ")))
    }

    /// Whether another set applies to a Pod that gets this one.
    pub(super) fn active(&self, at: usize) -> String {
        let peer = self.sets.get(at);
        let Some(peer) = peer.filter(|peer| self.base != Some(peer.name)) else {
            return "false".to_owned();
        };
        match self.canaries(peer.name) {
            Some(canaries) => format!("{} && !{canaries}", peer.selects),
            None => peer.selects.clone(),
        }
    }

    /// Other sets with their revisions, in order: index, whether it comes before this set, and the revision.
    pub(super) fn all(&self) -> impl Iterator<Item = (usize, bool, &Variant<'a>)> {
        let (sets, before) = (self.sets.iter().enumerate(), self.before);
        sets.flat_map(move |(at, peer)| {
            peer.variants
                .iter()
                .map(move |variant| (at, at < before, variant))
        })
    }

    /// Names of the sets that are on the other side of this one than their names alone would put them: those that come before this
    /// set although their names are greater, or behind although they are less.
    pub(super) fn out_of_order(&self) -> Vec<&'a str> {
        let sets = self.sets.iter().enumerate();
        sets.filter(|(at, peer)| (*at < self.before) != (peer.name < self.name))
            .map(|(_, peer)| peer.name)
            .collect()
    }

    /// Whether this set names its namespaces: then those out of order come behind it, otherwise before.
    pub(super) fn comes_first(&self) -> bool {
        self.scope == Scope::Namespaces
    }
}
