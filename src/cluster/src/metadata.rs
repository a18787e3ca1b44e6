//! Lists and watches of metadata only: the rest of an object is never received.

use http::header::ACCEPT;
use http::{HeaderValue, Request};
use kube::client::Body;
use tower::service_fn;

/// `Accept` header of a list; as client-go's metadata client.
const LIST_ACCEPT: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
/// `Accept` header of a watch.
const WATCH_ACCEPT: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

/// A client of the same cluster that lists and watches metadata; its kinds are `PartialObjectMeta<K>`.
#[must_use]
pub fn metadata_client(client: &kube::Client) -> kube::Client {
    let inner = client.clone();
    let service = service_fn(move |mut request: Request<Body>| {
        let query = request.uri().query().unwrap_or_default();
        let watch = query.split('&').any(|pair| pair == "watch=true");
        let accepted = HeaderValue::from_static(if watch { WATCH_ACCEPT } else { LIST_ACCEPT });
        request.headers_mut().insert(ACCEPT, accepted);
        let inner = inner.clone();
        async move { inner.send(request).await }
    });
    kube::Client::new(service, client.default_namespace())
}
