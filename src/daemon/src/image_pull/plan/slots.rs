//! Who gets the next slot: of the node and, if registries have fewer than the node, of the registry.

use std::collections::BTreeMap;

use super::board::TaskBoard;
use super::task::{PullOwner, PullTask, TagKey, pull_owners};

/// Limits of concurrent pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PullLimits {
    /// Maximum concurrent attempts, at least 1.
    pub max_parallel: usize,
    /// Maximum concurrent attempts on behalf of one namespace, at least 1.
    pub max_per_namespace: usize,
    /// Maximum concurrent attempts at one registry, at least 1. It has an effect if it is less than `max_parallel`.
    pub max_per_registry: usize,
    /// Whether a runtime is ready to pull.
    pub runtime_ready: bool,
}

impl PullLimits {
    /// The limits of a node: one slot is reserved, so that a namespace whose registry never answers does not occupy all
    /// slots. Those of a registry are not limited.
    pub fn for_node(max_parallel: usize, runtime_ready: bool) -> Self {
        Self {
            max_parallel,
            max_per_namespace: max_parallel.saturating_sub(1).max(1),
            max_per_registry: max_parallel,
            runtime_ready,
        }
    }

    /// Whether a registry has fewer slots than the node.
    pub fn limits_registries(&self) -> bool {
        self.max_per_registry < self.max_parallel
    }
}

/// Slots of the node or of one registry.
#[derive(Default)]
struct Slots {
    /// Slots that other attempts cannot take.
    kept: usize,
    /// Those of them that even a namespace without any slot cannot take.
    protected: usize,
    by_namespace: BTreeMap<String, usize>,
}

impl Slots {
    fn of_namespace(&self, namespace: &str) -> usize {
        self.by_namespace.get(namespace).copied().unwrap_or(0)
    }

    /// Whether the namespace may have one more of `max` slots.
    fn has_room_for(&self, namespace: &str, max: usize, max_per_namespace: usize) -> bool {
        let max_slots = if self.kept < max { max_per_namespace } else { 1 };
        self.protected < max && self.of_namespace(namespace) < max_slots
    }

    fn add(&mut self, namespace: &str, keeps_slot: bool, protected: bool) {
        self.kept += usize::from(keeps_slot);
        self.protected += usize::from(keeps_slot && protected);
        *self.by_namespace.entry(namespace.to_owned()).or_default() += 1;
    }
}

/// Whose turn it is: first the one with the fewest slots, and of these the one whose last slot is the longest ago.
type Share = (usize, u64);

/// The turn of a tag that may start for an owner; the smallest is the first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    /// That of the namespace at the registry.
    at_registry: Share,
    on_node: NodeTurn,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NodeTurn {
    namespace: Share,
    owner: Share,
    seq: u64,
}

/// Slots of running attempts.
#[derive(Default)]
pub(super) struct SlotUsage<'a> {
    node: Slots,
    by_registry: BTreeMap<&'a str, Slots>,
    by_owner: BTreeMap<PullOwner, usize>,
}

impl<'a> SlotUsage<'a> {
    /// Adds an attempt.
    pub(super) fn add(&mut self, registry: &'a str, owner: &PullOwner, keeps_slot: bool, protected: bool) {
        let at_registry = self.by_registry.entry(registry).or_default();
        for slots in [&mut self.node, at_registry] {
            slots.add(&owner.namespace, keeps_slot, protected);
        }
        *self.by_owner.entry(owner.clone()).or_default() += 1;
    }

    /// The tag that starts next, by its index in `ready`, and the owner that gets the slot.
    ///
    /// If registries have fewer slots than the node, namespaces take turns at each of them as they do on the node: one
    /// that always has other pulls on the node would not have its turn while others come to that registry.
    pub(super) fn next_start(
        &self,
        ready: &[(&TagKey, &PullTask)],
        board: &TaskBoard,
        limits: &PullLimits,
    ) -> Option<(usize, PullOwner)> {
        if self.node.protected >= limits.max_parallel {
            return None;
        }
        let mut candidates = Vec::new();
        for (index, (_, task)) in ready.iter().enumerate() {
            let registry = task.spec.registry();
            for owner in pull_owners(&task.spec) {
                if self.has_room_for(registry, &owner.namespace, limits) {
                    let turn = self.turn(task, &owner, board, limits);
                    candidates.push((turn, registry, index, owner));
                }
            }
        }
        // That of the one whose turn it is on the node. If another namespace is before it there, that one starts first,
        // however many slots it has.
        let (_, registry, ..) = candidates.iter().min_by_key(|(turn, ..)| turn.on_node)?;
        let registry = *registry;
        let at_registry = candidates.into_iter().filter(|(_, at, ..)| *at == registry);
        let (_, _, index, owner) = at_registry.min_by_key(|(turn, ..)| *turn)?;
        Some((index, owner))
    }

    /// Whether the namespace may have one more slot of the node and of the registry. None of a registry is reserved: one
    /// that does not answer a namespace answers no other either.
    fn has_room_for(&self, registry: &str, namespace: &str, limits: &PullLimits) -> bool {
        let PullLimits {
            max_parallel,
            max_per_namespace,
            max_per_registry: max,
            ..
        } = *limits;
        let at_registry = self.by_registry.get(registry);
        self.node.has_room_for(namespace, max_parallel, max_per_namespace)
            && at_registry.is_none_or(|slots| slots.has_room_for(namespace, max, max))
    }

    fn turn(&self, task: &PullTask, owner: &PullOwner, board: &TaskBoard, limits: &PullLimits) -> Turn {
        let (registry, namespace) = (task.spec.registry(), owner.namespace.as_str());
        let at_registry = if limits.limits_registries() {
            let slots = self.by_registry.get(registry);
            let slots = slots.map_or(0, |slots| slots.of_namespace(namespace));
            (slots, board.last_slot_order_at(registry, namespace))
        } else {
            Share::default()
        };
        let (namespace_order, owner_order) = board.last_slot_order(owner);
        let slots_of_owner = self.by_owner.get(owner).copied().unwrap_or(0);
        Turn {
            at_registry,
            on_node: NodeTurn {
                namespace: (self.node.of_namespace(namespace), namespace_order),
                owner: (slots_of_owner, owner_order),
                seq: task.seq,
            },
        }
    }
}
