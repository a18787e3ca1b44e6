//! What answers need to know of the cluster.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use futures::{StreamExt, future, stream};
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Api;
use kube::api::ListParams;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::cloneset::Owned;
use super::connections::Caller;
use super::container_recreate_request::{Seen, Target};
use super::deletion::{Claim, Kept, is_active, is_bound};
use super::known_fields::KnownFields;
use super::review::Request;
use super::room::Quota;
use super::{Options, cloneset};
use kruise_api::validation::{LONGEST_VALUE, cut};
use kruise_api::{keys, names};
use kruise_cluster::pod_template::{self, Answer, Defaults, Templates};
use kruise_cluster::{self as cluster, Cluster, Key, Mirror, write};
use kruise_workload::in_place::normal::Stored;

/// What we read for an answer must be there by then; the API server waits 10 s for us.
const READ: Duration = Duration::from_secs(5);
/// The same where it is only for a warning; such a webhook is waited for 5 s.
const GLANCE: Duration = Duration::from_secs(2);
/// The same for a dry run; such a webhook is waited for 5 s too.
const CHECK: Duration = Duration::from_secs(4);
/// Nodes that are looked up for a warning, and Pods that are at once.
const LOOKED_UP: usize = 16;
/// Requests to the API server at a time, weighed by what their answers may take of our memory: some MiB each.
const REQUESTS: usize = 32;
/// The same on behalf of one address.
const SHARE: usize = 16;
/// What a request weighs whose answer is an object's metadata, or a dry run, whose review has room for both.
const LIGHT: u32 = 2;
/// What one for a Pod weighs.
const POD: u32 = 4;
/// What one for a page of a list weighs.
const LIST: u32 = 16;
/// Objects of a namespace that are listed at a time.
const PAGE: u32 = 50;
/// Names of Pods that are looked up.
const NAMED: usize = 500;

/// How many of a page count.
fn count<T>(page: &[T], counts: impl Fn(&T) -> bool) -> usize {
    page.iter().filter(|one| counts(one)).count()
}

/// How many objects count of the first page that has any; 0 when no page has.
async fn first_page<F: Future<Output = Result<(usize, ListMeta), cluster::Error>>>(
    params: ListParams,
    list: impl Fn(ListParams) -> F,
) -> Result<usize, cluster::Error> {
    let mut params = params.limit(PAGE);
    loop {
        let (count, page) = list(params.clone()).await?;
        match page.continue_.filter(|next| !next.is_empty()) {
            Some(next) if count == 0 => params = params.continue_token(&next),
            _ => return Ok(count),
        }
    }
}

/// When an answer must be there.
#[derive(Clone, Copy)]
struct Deadline {
    at: Instant,
    after: Duration,
}

impl Deadline {
    fn after(after: Duration) -> Self {
        let at = Instant::now() + after;
        Self { at, after }
    }
}

/// Looks at the cluster for answers; clones share what is known.
#[derive(Clone)]
pub(super) struct Look {
    /// The connection.
    pub cluster: Cluster,
    defaults: Defaults,
    vertical: bool,
    virtual_nodes: Mirror<()>,
    requests: Quota,
    caller: IpAddr,
}

impl Look {
    /// Also gives the task that keeps it up to date. Only virtual nodes are watched, of which there are
    /// few or none, so that an answer need not ask for the Pod's node.
    pub fn new(cluster: &Cluster, options: &Options) -> (Self, impl Future<Output = ()> + use<>) {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let only = ListParams::default().labels(&format!("{}={}", keys::TYPE, keys::TYPE_VIRTUAL_KUBELET));
        let (virtual_nodes, watching) = cluster.mirror(nodes, only, |_: Node| Some(()));
        (
            Self {
                cluster: cluster.clone(),
                defaults: options.defaults,
                vertical: options.vertical,
                virtual_nodes,
                requests: Quota::new(REQUESTS, SHARE),
                caller: Ipv4Addr::UNSPECIFIED.into(),
            },
            watching,
        )
    }

    /// The same on behalf of a caller.
    pub fn asked_by(&self, caller: &Caller) -> Self {
        Self {
            caller: caller.address,
            ..self.clone()
        }
    }

    /// What the API server answers in time, once there is room for another request of this caller.
    async fn request<T>(
        &self,
        (verb, kind, weight): (&'static str, &str, u32),
        Deadline { at, after }: Deadline,
        answer: impl Future<Output = Result<T, cluster::Error>>,
    ) -> Result<T, cluster::Error> {
        let kind = || kind.to_owned();
        let Ok(Ok(_held)) = timeout_at(at, self.requests.take(self.caller, weight)).await else {
            let kind = kind();
            return Err(cluster::Error::Crowded { verb, kind, after });
        };
        match timeout_at(at, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(cluster::Error::Timeout {
                verb,
                kind: kind(),
                after,
            }),
        }
    }

    /// Whether no node has that name, as far as that can be said in time.
    async fn is_absent(&self, nodes: &Api<Node>, name: &str, until: Deadline) -> bool {
        let get = write::get_partial::<_, IgnoredAny>(nodes, &(), name);
        matches!(
            self.request(("get", "Node", LIGHT), until, get).await,
            Ok(None) | Err(cluster::Error::Name { .. })
        )
    }

    /// The Pod of a request to be created, and whether its node is a virtual one.
    ///
    /// # Errors
    /// In words, when it cannot be said in time.
    pub async fn at_pod(&self, asked: &Request) -> Result<Seen, String> {
        let name = asked.object["spec"]["podName"].as_str().unwrap_or_default();
        if !names::is_subdomain(name) {
            return Ok(Seen::default());
        }
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &asked.namespace);
        let until = Deadline::after(READ);
        let synced = timeout_at(until.at, self.virtual_nodes.synced()).await;
        synced.map_err(|_| format!("no answer within {READ:?}"))?;
        let get = write::read::<Target>(pods, name);
        let pod = self.request(("get", "Pod", POD), until, get).await;
        let pod = pod.map_err(|why| why.to_string())?;
        let pod = pod.transpose()?.map(Pod::from);
        let node = pod
            .as_ref()
            .and_then(|pod| pod.spec.as_ref()?.node_name.as_deref());
        let virtual_node = node.is_some_and(|node| self.virtual_nodes.get(&Key::cluster(node)).is_some());
        Ok(Seen { pod, virtual_node })
    }

    /// Those of a job's nodes that do not exist, if that can be said in time; it is only for a warning.
    pub async fn unknown_nodes(&self, asked: &Request) -> Vec<String> {
        let named = asked.object["spec"]["selector"]["names"].as_array();
        let names = named
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .take(LOOKED_UP);
        let nodes: Api<Node> = Api::all(self.cluster.client.clone());
        let until = Deadline::after(GLANCE);
        let lookups = names.map(|name| {
            let nodes = &nodes;
            async move {
                let absent = self.is_absent(nodes, name, until).await;
                absent.then(|| cut(name, LONGEST_VALUE).into_owned())
            }
        });
        let all = future::join_all(lookups).await;
        all.into_iter().flatten().collect()
    }

    /// What the API server says to the templates of a CloneSet, if they are new.
    pub async fn templates(&self, asked: &Request) -> Option<Result<Answer, cluster::Error>> {
        let templates = cloneset::new_templates(asked)?;
        // For both questions: the webhook's own time is not much longer.
        let until = Deadline::after(CHECK);
        let answer = self.ask(asked, templates, until).await;
        let Ok(Answer::Good { unknown, .. }) = &answer else {
            return Some(answer);
        };
        if !asked.strict || unknown.is_empty() {
            return Some(answer);
        }
        let known = KnownFields::of(asked);
        if known.new_among(unknown).is_empty() {
            return Some(answer);
        }
        let misspelled = self.misspelled(asked, until).await;
        let why = misspelled
            .ok()
            .and_then(|fields| cloneset::strictly(&known, &fields));
        // Without an answer there is a warning.
        Some(why.map_or(answer, |why| Ok(Answer::Bad(why))))
    }

    async fn misspelled(&self, asked: &Request, until: Deadline) -> Result<Vec<String>, cluster::Error> {
        let templates = self.whole(asked, Templates::of(&asked.object["spec"]));
        let fields = pod_template::misspelled(&self.cluster, &asked.namespace, templates);
        self.request(("create", "PodTemplate", LIGHT), until, Box::pin(fields))
            .await
    }

    /// The Pod template that an update replaces, as it would be stored now, where only what a Pod can change may
    /// change.
    pub async fn before(&self, asked: &Request) -> Option<cloneset::Before> {
        let old = &asked.old.as_ref()?["spec"];
        if !cloneset::keeps_pods(&asked.object) || old["template"] == asked.object["spec"]["template"] {
            return None;
        }
        let until = Deadline::after(CHECK);
        let template = match self.ask(asked, Templates::of(old), until).await {
            Ok(Answer::Good { templates, .. }) => templates.template,
            _ => old["template"].clone(),
        };
        Some(cloneset::Before {
            template,
            stored: Stored::of(self.defaults.none),
            vertical: self.vertical,
        })
    }

    /// What keeps a protected Namespace from being deleted.
    ///
    /// # Errors
    /// When it cannot be said in time, with the kind that could not be listed.
    pub async fn kept(&self, namespace: &str) -> Result<Option<Kept>, (&'static str, cluster::Error)> {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        let running = ListParams::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        let until = Deadline::after(CHECK);
        let active = |params| {
            let pods = &pods;
            async move {
                let list = write::list_metadata(pods, &(), &params);
                let page = self.request(("list", "Pod", LIST), until, list).await?;
                Ok((count(&page.items, |pod| is_active(&pod.metadata)), page.metadata))
            }
        };
        let active = first_page(running, active).await;
        match active.map_err(|why| ("pods", why))? {
            0 => {}
            count => return Ok(Some(Kept::Pods(count))),
        }
        let until = Deadline::after(CHECK);
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.cluster.client.clone(), namespace);
        let bound = |params| {
            let claims = &claims;
            async move {
                let list = write::list::<Claim>(claims, &params);
                let kind = "PersistentVolumeClaim";
                let page = self.request(("list", kind, LIST), until, list).await?;
                Ok((count(&page.items, is_bound), page.metadata))
            }
        };
        let bound = first_page(ListParams::default(), bound).await;
        Ok(Some(bound.map_err(|why| ("pvc", why))?)
            .filter(|count| *count > 0)
            .map(Kept::Claims))
    }

    /// The templates with what policies may ask for of their workload.
    fn whole(&self, asked: &Request, templates: Templates) -> Templates {
        let metadata = &asked.object["metadata"];
        Templates {
            labels: metadata["labels"].clone(),
            annotations: metadata["annotations"].clone(),
            ..templates
        }
    }

    async fn ask(
        &self,
        asked: &Request,
        templates: Templates,
        until: Deadline,
    ) -> Result<Answer, cluster::Error> {
        let templates = self.whole(asked, templates);
        let answer = pod_template::ask(&self.cluster, &asked.namespace, templates, self.defaults);
        self.request(("create", "PodTemplate", LIGHT), until, Box::pin(answer))
            .await
    }

    /// Names newly in `podsToDelete` that no Pod of the CloneSet has, if that can be said in time.
    pub async fn no_pods(&self, asked: &Request) -> Vec<String> {
        let uid = asked.object["metadata"]["uid"].as_str().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &asked.namespace);
        let names = cloneset::newly_to_delete(asked).into_iter().take(NAMED);
        let names: Vec<String> = names.map(str::to_owned).collect();
        let until = Deadline::after(GLANCE);
        let lookups = names.into_iter().map(|name| {
            let pods = &pods;
            async move {
                let get = write::get_partial(pods, &(), &name);
                let pod: Option<Owned> = match self.request(("get", "Pod", LIGHT), until, get).await {
                    Err(cluster::Error::Name { .. }) => None,
                    found => found.ok()?,
                };
                let ours = pod.is_some_and(|pod| cloneset::owns(uid, &pod));
                (!ours).then(|| cut(&name, LONGEST_VALUE).into_owned())
            }
        });
        let found = stream::iter(lookups).buffer_unordered(LOOKED_UP);
        let in_time = found.take_until(sleep_until(until.at));
        let mut missing: Vec<String> = in_time.filter_map(future::ready).collect().await;
        missing.sort_unstable();
        missing
    }
}
