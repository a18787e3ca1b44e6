//! Instance IDs of Pods, which they share with their claims.

use std::collections::{BTreeSet, HashSet};

use super::view::PlanView;
use kruise_api::{keys, names};
use kruise_workload::claim::Claim;
use kruise_workload::in_place::Pod;

/// Characters of an instance ID.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Length of an instance ID.
const LENGTH: usize = 5;

/// The name of the Pod with this ID.
pub(super) fn pod_name(view: &PlanView<'_>, id: &str) -> String {
    format!(
        "{}-{id}",
        view.observed.set.metadata.name.as_deref().unwrap_or_default()
    )
}

/// IDs of attempted Pods that are still missing or may still appear; the latter come first. They are retried under the
/// same name, so that there is at most one Pod.
pub(super) fn attempted_ids<'a>(view: &PlanView<'a>) -> Vec<&'a str> {
    let names = &view.observed.unfinished.pods;
    if names.is_empty() {
        return Vec::new();
    }
    let prefix = pod_name(view, "");
    let id = |(name, _): (&'a String, _)| name.strip_prefix(&prefix);
    let (unknown, refused): (Vec<_>, Vec<_>) = names
        .iter()
        .partition(|(_, until)| until.is_some_and(|until| until > view.now));
    let missing = view.replica_counts(|pod| view.counts_as_updated(pod)).scale_up;
    let count = unknown.len().max(usize::try_from(missing).unwrap_or_default());
    unknown
        .into_iter()
        .chain(refused)
        .filter_map(id)
        .take(count)
        .collect()
}

/// IDs that a new Pod cannot have: those of Pods, of terminating claims, which keep their names for a while, and of Pods
/// whose claims have names of others' claims.
pub(super) fn unavailable_ids<'a>(view: &PlanView<'a>, kept_claims: &BTreeSet<&str>) -> HashSet<&'a str> {
    let observed = view.observed;
    let of_pod = |pod: &'a std::sync::Arc<Pod>| {
        let last = pod.name.rsplit_once('-').map(|(_, id)| id);
        let label = pod.labels.get(keys::CLONESET_INSTANCE_ID);
        label.map(String::as_str).into_iter().chain(last)
    };
    let deleting = observed
        .claims
        .iter()
        .filter(|claim| !is_kept(kept_claims, claim));
    let pods = observed.pods.iter().flat_map(of_pod);
    let prefix = pod_name(view, "");
    let taken = observed.unfinished.without_claims.iter();
    let taken = taken.filter_map(|name| name.strip_prefix(&prefix));
    pods.chain(deleting.map(|claim| claim.instance_id.as_str()))
        .chain(taken)
        .collect()
}

/// IDs of kept claims that no Pod uses. Users may write the label of a claim, so not every ID can be in a Pod's name.
pub(super) fn unused_claim_ids<'a>(
    view: &PlanView<'a>,
    kept_claims: &BTreeSet<&str>,
    unavailable: &HashSet<&str>,
) -> BTreeSet<&'a str> {
    let all = view
        .observed
        .claims
        .iter()
        .filter(|claim| is_kept(kept_claims, claim));
    all.map(|claim| claim.instance_id.as_str())
        .filter(|id| !unavailable.contains(id) && names::is_subdomain(&pod_name(view, id)))
        .collect()
}

pub(super) fn is_kept(kept_claims: &BTreeSet<&str>, claim: &Claim) -> bool {
    kept_claims.contains(claim.name.as_str())
}

/// Unused IDs, sorted: attempted ones, then those of kept claims without a Pod, then new ones.
pub(super) fn instance_ids<'a>(
    view: &PlanView<'a>,
    mut unavailable: HashSet<&'a str>,
    unused: BTreeSet<&'a str>,
    count: usize,
) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    for id in attempted_ids(view).iter().chain(&unused) {
        if ids.len() < count && !unavailable.contains(id) {
            ids.insert((*id).to_owned());
        }
    }
    unavailable.extend(unused);
    let mut seed = view.observed.rng_seed;
    while ids.len() < count {
        let id = random_id(&mut seed);
        if !unavailable.contains(id.as_str()) {
            ids.insert(id);
        }
    }
    ids
}

/// The next ID from `seed` (splitmix64).
fn random_id(seed: &mut u64) -> String {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *seed;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    let letters = ALPHABET.len() as u64;
    let letter = |_| {
        let at = usize::try_from(bits % letters).unwrap_or_default();
        bits /= letters;
        char::from(ALPHABET[at])
    };
    (0..LENGTH).map(letter).collect()
}
