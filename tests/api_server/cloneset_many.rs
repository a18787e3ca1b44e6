//! Limits of large CloneSets.

use serde_json::json;

use crate::cloneset::{set, sets, update};
use crate::world::{create, merge, refused};

/// A large CloneSet, made well and then edited badly, and made badly.
#[tokio::test]
async fn percentages_of_many_pods_are_refused_where_they_are_none() {
    for version in ["apps.kruise.io/v1beta1", "apps.kruise.io/v1alpha1"] {
        let (sets, name) = (sets(version).await, format!("many-{}", version.len()));
        let mut many = update(version, json!({ "partition": "99.98%" }));
        many["replicas"] = json!(5000);
        create(&sets, set(version, &name, many)).await.unwrap();
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
            // No `int32` holds the last.
            for bad in texts
                .map(|text| json!(text))
                .into_iter()
                .chain([json!(5_000_000_000_i64)])
            {
                let limits = update(version, json!({ field: bad }));
                let bad = bad.as_str().map_or_else(|| bad.to_string(), str::to_owned);
                let message = format!("it is {bad}; give a number of Pods, 0 or greater, or a percentage");
                for made in [
                    merge(&sets, &name, json!({ "spec": limits })).await,
                    create(&sets, set(version, "bad", limits.clone())).await,
                ] {
                    let why = made.unwrap_err();
                    let place = format!(".{field}: Invalid value: ");
                    assert!(
                        why.contains(&place) && why.contains(&message),
                        "{place}…{message} is not in {why}"
                    );
                }
            }
        }
        let selector = json!({ "spec": { "selector": { "matchLabels": { "app": "a", "more": "b" } } } });
        refused(
            merge(&sets, &name, selector).await,
            "spec.selector cannot be changed",
        );
    }
}
