//! Limits of large CloneSets.

use serde_json::json;

use crate::cloneset::{cloneset, cloneset_api, update_strategy};
use crate::webhook_cluster::{assert_denied, create, merge};

/// A large CloneSet: created valid and then updated to invalid values, and created invalid.
#[tokio::test]
async fn invalid_percentages_of_large_clonesets_are_rejected() {
    for version in ["apps.kruise.io/v1beta1", "apps.kruise.io/v1alpha1"] {
        let (sets, name) = (cloneset_api(version).await, format!("many-{}", version.len()));
        let mut limits_of_many = update_strategy(version, json!({ "partition": "99.98%" }));
        limits_of_many["replicas"] = json!(5000);
        create(&sets, cloneset(version, &name, limits_of_many))
            .await
            .unwrap();
        for field in ["partition", "maxUnavailable", "maxSurge"] {
            let texts = [
                "50",
                "abc%",
                "-5%",
                "%",
                "5 %",
                "1e2%",
                "50.%",
                "50%%",
                "",
                "5000000000%",
            ];
            // The last does not fit into `int32`.
            for invalid in texts
                .map(|text| json!(text))
                .into_iter()
                .chain([json!(5_000_000_000_i64)])
            {
                let limits = update_strategy(version, json!({ field: invalid }));
                let invalid = invalid
                    .as_str()
                    .map_or_else(|| invalid.to_string(), str::to_owned);
                let message =
                    format!("it is {invalid}; give a number of Pods, 0 or greater, or a percentage");
                for result in [
                    merge(&sets, &name, json!({ "spec": limits })).await,
                    create(&sets, cloneset(version, "bad", limits.clone())).await,
                ] {
                    let why = result.unwrap_err();
                    let place = format!(".{field}: Invalid value: ");
                    assert!(
                        why.contains(&place) && why.contains(&message),
                        "{place}…{message} is not in {why}"
                    );
                }
            }
        }
        let selector = json!({ "spec": { "selector": { "matchLabels": { "app": "a", "more": "b" } } } });
        assert_denied(
            merge(&sets, &name, selector).await,
            "spec.selector cannot be changed",
        );
    }
}
