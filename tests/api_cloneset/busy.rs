//! An API server that has too much to do says so, and is heeded.

use serde_json::json;

use crate::errors::{said, says};
use crate::field::Field;
use crate::lost::shared;
use crate::proxy::Loss;

#[tokio::test]
async fn what_the_api_server_is_too_busy_for_is_told_and_done_when_it_is_not() {
    let bed = shared().await;
    let field = Field::new(bed.world, "busy").await;
    // Each of the three is sent four times before that is told; and then one of them at a time, twice more.
    bed.proxy.lose("busy", "create pods", Loss::Busy, 1, 20);
    field.set("web", json!({ "replicas": 3 })).await;
    let set = says(
        &field,
        "FailedScale",
        "too many requests, and it asks to try again after 1 s",
    )
    .await;
    let failed = said(&set, "FailedScale");
    assert!(failed.ends_with("try again after 1 s"), "{failed}");
    let set = field.settled("web").await;
    assert_eq!(said(&set, "FailedScale"), "");
    // Nothing was done, so there is nothing to look for, but for Pods to adopt at the beginning.
    assert_eq!(bed.proxy.answered("busy", "get pods"), 1);
}
