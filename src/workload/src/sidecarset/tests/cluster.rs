//! A SidecarSet, its Pods and its revisions as the vectors of whole reconciles have them.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::string_map;
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_api::sidecarset::{SidecarSetSpec, SidecarSetStatus};
use serde_json::{Value, json};

use crate::in_place::Pod;
use crate::revision::Revision;
use crate::sidecarset::history::ListedRevision;
use crate::sidecarset::matching::is_matched;
use crate::sidecarset::plan::Observed;
use crate::sidecarset::set::SetView;

pub(super) static NONE_REFUSED: std::collections::BTreeSet<String> = std::collections::BTreeSet::new();

pub(super) struct Cluster {
    pub(super) name: String,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) annotations: BTreeMap<String, String>,
    pub(super) spec: SidecarSetSpec,
    pub(super) status: SidecarSetStatus,
    pub(super) generation: i64,
    /// By namespace, then name.
    pub(super) pods: Vec<(String, Pod)>,
    pub(super) raw_revisions: Vec<Value>,
}

impl Cluster {
    pub(super) fn new(input: &Value) -> Self {
        Self::parse(input).unwrap()
    }

    /// `None` if the SidecarSet is not one of the API server.
    pub(super) fn parse(input: &Value) -> Option<Self> {
        let set = &input["sidecarSet"];
        let mut pods: Vec<(String, Pod)> = list(&input["pods"])
            .map(|pod| (text(&pod["metadata"]["namespace"]), Pod::from_json(pod)))
            .collect();
        pods.sort_by_key(|(namespace, pod)| (namespace.clone(), pod.name.clone()));
        Some(Self {
            name: text(&set["metadata"]["name"]),
            labels: string_map(&set["metadata"]["labels"]),
            annotations: string_map(&set["metadata"]["annotations"]),
            spec: serde_json::from_value(set["spec"].clone()).ok()?,
            status: serde_json::from_value::<Option<_>>(set["status"].clone())
                .ok()?
                .unwrap_or_default(),
            generation: set["metadata"]["generation"].as_i64().unwrap_or_default(),
            pods,
            raw_revisions: list(&input["controllerRevisions"]).cloned().collect(),
        })
    }

    pub(super) fn observed<'a>(&'a self, set: &'a Value) -> Observed<'a> {
        Observed {
            name: &self.name,
            uid: set["metadata"]["uid"].as_str().unwrap_or_default(),
            generation: self.generation,
            resource_version: set["metadata"]["resourceVersion"].as_str().unwrap_or_default(),
            labels: &self.labels,
            annotations: &self.annotations,
            spec: &self.spec,
            status: &self.status,
            refused: &NONE_REFUSED,
            failed: &NONE_REFUSED,
        }
    }

    /// Indexes of the matched Pods.
    pub(super) fn matched(&self) -> Vec<usize> {
        let set = SetView {
            name: &self.name,
            resource_version: "",
            annotations: &self.annotations,
            latest_revision: "",
            spec: &self.spec,
        };
        let matches = |at: &usize| {
            let (namespace, pod) = &self.pods[*at];
            let mut labels = BTreeMap::from([(keys::NAMESPACE_NAME.to_owned(), namespace.clone())]);
            if namespace == "e" {
                labels.insert("env".to_owned(), "prod".to_owned());
            }
            is_matched(&set, pod, Some(&labels))
        };
        (0..self.pods.len()).filter(matches).collect()
    }

    pub(super) fn revisions(&self) -> Vec<ListedRevision<Revision>> {
        let read = |raw: &Value| {
            let mut raw = raw.clone();
            set(&mut raw, &["apiVersion"], json!("apps/v1"));
            set(&mut raw, &["kind"], json!("ControllerRevision"));
            let revision: ControllerRevision = serde_json::from_value(raw).ok()?;
            Some(ListedRevision {
                controller: Owner::controller(&revision.metadata),
                revision: Revision::from(&revision),
            })
        };
        self.raw_revisions.iter().filter_map(read).collect()
    }
}

pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub(super) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}
