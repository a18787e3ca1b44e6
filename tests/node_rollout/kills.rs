//! The manager is killed while Pods are being updated, at moments that chance decides.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::json;

use crate::workloads::pods::{container, identities, revision, runs, state};
use crate::workloads::{Bed, Space, alone};

/// The longest time between a Pod's beginning to be updated and a kill: about what an update takes.
const LATEST: u64 = 2500;

/// How often the manager is killed: 50 times in `cargo xtask test --soak`.
fn kills() -> u32 {
    if std::env::var_os("KRUISE_SOAK").is_some() {
        50
    } else {
        5
    }
}

/// Numbers from a seed (SplitMix64).
struct Chance(u64);

impl Chance {
    /// From `KRUISE_SEED`, to have a run again, or the clock.
    fn new() -> Self {
        let given = std::env::var("KRUISE_SEED")
            .ok()
            .and_then(|text| text.parse().ok());
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros();
        let seed = given.unwrap_or_else(|| u64::try_from(clock()).unwrap());
        println!("KRUISE_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// Waits until so many Pods run the image or are on their way to it, then a while, and until a Pod is being updated.
async fn moment<G: std::ops::Deref<Target = Bed>>(
    space: &Space<G>,
    image: &str,
    begun: usize,
    wait: Duration,
) {
    let on_its_way = |pod: &&&serde_json::Value| pod["spec"]["containers"][0]["image"] == image;
    space
        .until_pods("web", "some are being updated", |pods| {
            pods.iter().filter(on_its_way).count() >= begun
        })
        .await;
    // Chance, not a wait for anything.
    tokio::time::sleep(wait).await;
    space
        .until_pods("web", "one is being updated, or all are", |pods| {
            pods.iter().any(|pod| state(pod) == "Updating") || pods.iter().all(|pod| runs(pod, image))
        })
        .await;
}

/// Waits for the end of the rollout: the same Pods, each restarted once for each of the updates.
async fn ended_right<G: std::ops::Deref<Target = Bed>>(
    space: &Space<G>,
    image: &str,
    before: &BTreeMap<String, String>,
    updates: u32,
) {
    let status = space.settled("web").await;
    space.settled("new").await;
    let pods = space.pods_of("web").await;
    assert_eq!(identities(pods.values()), *before, "kill {updates}");
    for pod in pods.values() {
        assert!(runs(pod, image), "kill {updates}: {pod}");
        assert_eq!(container(pod, "app").restarts, i64::from(updates), "{pod}");
        assert_eq!(revision(pod), status.update_revision);
    }
}

#[tokio::test]
async fn a_manager_that_dies_in_mid_rollout_is_followed_by_one_that_ends_it_right() {
    let mut space = alone().await;
    let mut chance = Chance::new();
    let surging = json!({ "podUpdatePolicy": "ReCreate", "maxUnavailable": 0, "maxSurge": 1 });
    space.set("web", json!({ "replicas": 3 })).await;
    let set = json!({ "replicas": 2, "updateStrategy": { "rollingUpdate": surging } });
    space.set("new", set).await;
    space.settled("web").await;
    space.settled("new").await;
    let before = identities(space.pods_of("web").await.values());
    let (web, new) = (space.witness("web").await, space.witness("new").await);
    let (mut amid, kills) = (0, kills());
    for kill in 1..=kills {
        let image = if kill % 2 == 1 {
            "kruise-test/term:2"
        } else {
            "kruise-test/term:1"
        };
        space.image("web", image).await;
        space.image("new", image).await;
        let begun = usize::try_from(1 + chance.below(3)).unwrap();
        let wait = Duration::from_millis(chance.below(LATEST));
        moment(&space, image, begun, wait).await;
        space.bed.manager.kill().unwrap();
        let pods = space.pods_of("web").await;
        amid += u32::from(pods.values().any(|pod| !runs(pod, image)));
        let states: Vec<String> = pods.values().map(state).collect();
        println!("kill {kill}: {begun} begun, {wait:?} later: {states:?}");
        space.bed.manager.start().unwrap();

        ended_right(&space, image, &before, kill).await;
        let (web, new) = (web.seen(), new.seen());
        assert!(web.least_serving >= 2 && web.most <= 3, "kill {kill}: {web:#?}");
        assert!(new.least_serving >= 2 && new.most <= 3, "kill {kill}: {new:#?}");
    }
    println!(
        "{kills} kills, {amid} of them amid the rollout; {} states looked at",
        web.seen().looks
    );
    assert!(
        amid * 2 > kills,
        "only {amid} kills of {kills} were amid a rollout"
    );
    let ever = new.seen().ever.len();
    assert_eq!(
        ever,
        2 + 2 * usize::try_from(kills).unwrap(),
        "one new Pod for each update"
    );
}
