//! A CloneSet that is changed while the manager is in the middle of what was asked before.

use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::lost::shared;
use crate::proxy::Loss;
use crate::waits;

/// So many Pods are written to at a time at least: half of what the manager has places for, as tests beside need some.
const AT_ONCE: usize = 32;
/// There are more of them than are written to at once.
const PODS: usize = 200;
/// All places, and the few that may be taken again before the news is taken in.
const UNDER_WAY: usize = 100;

#[tokio::test]
async fn what_is_no_longer_wanted_is_not_gone_on_with() {
    let bed = shared().await;
    let field = Field::new(bed.world, "changed").await;
    // Nobody runs them, so that they go at once.
    field.kubelet_goes();
    let spread = json!({ "replicas": PODS, "scaleStrategy": { "maxUnavailable": "100%" } });
    field.set("web", spread).await;
    let all = |pods: &[&Value]| pods.len() == PODS;
    let before = identities(&field.until_pods("web", "all of them", all).await);

    let words = "they-are-wanted-after-all";
    bed.proxy
        .lose("changed", "delete pods", Loss::Until(words), 1, usize::MAX);
    field.edit("web", json!({ "spec": { "replicas": 0 } })).await;
    // They go side by side, so many that nothing waits for its turn at the API server.
    let asked = async || (bed.proxy.lost("changed").len() >= AT_ONCE).then_some(());
    let log = || waits::tails([bed.manager.log().to_owned()]);
    waits::until("the first deletions", &log, asked).await;
    let back = json!({ "metadata": { "annotations": { "why": words } }, "spec": { "replicas": PODS } });
    field.edit("web", back).await;

    field.status("web", "the change taken up", |_| true).await;
    let after = identities(&field.until_pods("web", "all of them again", all).await);
    let kept = before.iter().filter(|pod| after.contains(pod)).count();
    assert!(kept >= PODS - UNDER_WAY, "{kept} of {PODS} were left");
}
