//! SidecarSets as the cluster would have them, and what becomes of a Pod with them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::cloneset::string_map;
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSetSpec;
use kruise_workload::sidecarset::inject;
use kruise_workload::sidecarset::policy::{Options, compile};
use kruise_workload::sidecarset::set::SetView;
use serde::Deserialize;
use serde_json::Value;

/// A SidecarSet as the cluster would have it.
pub struct Stored {
    pub name: String,
    annotations: BTreeMap<String, String>,
    pub resource_version: String,
    latest_revision: String,
    pub spec: SidecarSetSpec,
}

impl Stored {
    pub fn from_json(set: &Value) -> Self {
        Self {
            name: set["metadata"]["name"].as_str().unwrap().to_owned(),
            annotations: string_map(&set["metadata"]["annotations"]),
            resource_version: "1".to_owned(),
            latest_revision: set["status"]["latestRevision"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            spec: SidecarSetSpec::deserialize(&set["spec"]).unwrap(),
        }
    }

    /// A set whose policy makes a request fail that it cannot do.
    pub fn with_policy(set: &Value) -> Self {
        let mut stored = Self::from_json(set);
        let policy = (keys::SIDECAR_SET_FAILURE_POLICY.to_owned(), "Fail".to_owned());
        stored.annotations.extend([policy]);
        stored
    }

    pub fn view(&self) -> SetView<'_> {
        SetView {
            name: &self.name,
            resource_version: &self.resource_version,
            annotations: &self.annotations,
            latest_revision: &self.latest_revision,
            spec: &self.spec,
        }
    }
}

/// The policies of these sets.
pub fn compile_all(sets: &[Stored]) -> Vec<Value> {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let options = Options {
        namespace: "kruise-system",
        sort_containers: false,
        sets: &views,
        revisions: &[],
    };
    views
        .iter()
        .flat_map(|set| compile(set, &options).unwrap())
        .collect()
}

/// A Pod of namespace `default` as the function makes it of one that the API server has read.
pub fn inject_all(sets: &[Stored], pod: &Value) -> Value {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let labels = BTreeMap::from([("kubernetes.io/metadata.name".to_owned(), "default".to_owned())]);
    let cluster = inject::Cluster {
        sets: &views,
        namespace_labels: Some(&labels),
        revisions: &[],
    };
    let options = inject::Options {
        sort_containers: false,
        now: Timestamp::UNIX_EPOCH,
    };
    let mut pod = pod.clone();
    inject::inject(&mut pod, "default", &cluster, &options, &mut || 0).unwrap();
    pod
}
